"""The model over HTTP. `worker` knows no HTTP; what stands on it is an API each."""
