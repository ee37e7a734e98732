-- Lists of a tier or prefix are ordered by the last change, not by the hash: the newest rows come last in these
-- indexes, so that a million new rows touch few index pages.
-- The new indexes are created before the old ones are dropped: the table can be read while an index is built, but not
-- after a DROP until the transaction ends.
CREATE INDEX quotas_by_tier_and_change ON quotas (tier, revision);
CREATE INDEX quotas_by_prefix_and_change ON quotas (key_prefix, revision);
DROP INDEX quotas_by_tier;
DROP INDEX quotas_by_prefix;
