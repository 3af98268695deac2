"""What a run reports while it trains: one stream of records, which monitors write down."""
