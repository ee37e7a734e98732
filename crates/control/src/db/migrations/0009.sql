-- The terms that stay in effect until a pending `effective_at`, if there were any before.
ALTER TABLE quotas ADD COLUMN until_tier TEXT;
ALTER TABLE quotas ADD COLUMN until_overrides TEXT;
ALTER TABLE quotas ADD COLUMN until_expires_at BIGINT;
