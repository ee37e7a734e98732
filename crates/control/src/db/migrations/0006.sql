-- Lists of a tier or of a beginning are in the order of the last change, not of the hash: what is written last comes last in
-- these indexes, so that a million rows at once touch few of their pages.
-- First the new ones, and then the end of the old ones: while an index comes about the table can be read, after a DROP it
-- cannot until all is done.
CREATE INDEX quotas_by_tier_and_change ON quotas (tier, revision);
CREATE INDEX quotas_by_prefix_and_change ON quotas (key_prefix, revision);
DROP INDEX quotas_by_tier;
DROP INDEX quotas_by_prefix;
