-- Lists of a tier or of a beginning are in the order of the last change, not of the hash: what is written last comes last in
-- these indexes, so that a million rows at once touch few of their pages.
DROP INDEX quotas_by_tier;
DROP INDEX quotas_by_prefix;
CREATE INDEX quotas_by_tier ON quotas (tier, revision);
CREATE INDEX quotas_by_prefix ON quotas (key_prefix, revision);
