"""Inner parts of ``burnish.protocol``; import that instead."""
