"""An engine whose model somebody else serves: rows become requests to an OpenAI-compatible server."""
