"""Lightning hooks to measures to records; thin."""
