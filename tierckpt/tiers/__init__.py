"""Where bytes live: one contract (:mod:`.base`), one module per kind of place, and the store with its chain on top."""
