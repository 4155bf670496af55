"""What verbs print: JSON documents for programs, one live table for people."""
