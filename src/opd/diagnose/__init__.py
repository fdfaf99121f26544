"""What a run shows before and after it trains: doctor and report."""
