-- What goes on acting until `effective_at`, where that is to come and something acted before.
ALTER TABLE quotas ADD COLUMN until_tier TEXT;
ALTER TABLE quotas ADD COLUMN until_overrides TEXT;
ALTER TABLE quotas ADD COLUMN until_expires_at BIGINT;
