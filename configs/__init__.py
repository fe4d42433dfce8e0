"""Settings: their schema, the loader of recipes and flags, the shipped recipes and DeepSpeed files."""
