"""HyperCLIP: a block-diagonal adapter that scales CLIP's projections, and open-vocabulary segmentation with it."""
