"""What is live, on the command line: changed, shown, watched, called."""
