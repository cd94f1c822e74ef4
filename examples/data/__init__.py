"""Data sets as `FeatureSchema` and `Batch`: MovieLens-100K, a seeded synthetic log, and what both are built with."""
