-- Search by the beginning of keys; and what was deleted, for its purge.
CREATE INDEX quotas_by_prefix ON quotas (key_prefix, key_hash);
CREATE INDEX quotas_deleted ON quotas (updated_at) WHERE deleted = 1;
