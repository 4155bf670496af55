"""Scores of outputs that hold many decisions a sample: labels, pixels, boxes."""
