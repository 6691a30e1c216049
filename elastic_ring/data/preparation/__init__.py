"""From documents to token shards and a manifest: `elastic-ring data prepare`."""
