"""One candidate's benchmark: `session` puts deployment, load, search and cache together."""
