"""What the measurements of the live repository share: models that say who they are, and kills."""
