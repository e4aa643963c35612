"""HyperCLIP's segmenter: open-vocabulary semantic segmentation by cost aggregation over dense CLIP features."""
