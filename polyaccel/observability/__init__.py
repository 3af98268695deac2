"""What a run tells of itself while it trains: one stream of records, which monitors write down."""
