"""Training of any timm backbone: classification, semantic segmentation, detection and instance masks."""
