"""A real model small enough for a laptop: scikit-learn's handwritten digits and a CNN."""
