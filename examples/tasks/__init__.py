"""A small model for every task: `python -m examples.tasks TASK FOLDER` writes one to qualify."""
