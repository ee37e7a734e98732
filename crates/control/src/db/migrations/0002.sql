-- Indexes for the search by key prefix, and for purging deleted quotas.
CREATE INDEX quotas_by_prefix ON quotas (key_prefix, key_hash);
CREATE INDEX quotas_deleted ON quotas (updated_at) WHERE deleted = 1;
