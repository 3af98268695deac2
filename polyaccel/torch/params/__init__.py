"""A module's parameters: their names and types, the units that gather them, and the engine that owns them."""
