"""What it costs, beside peers and limits."""
