-- Heartbeats of nodes. The database's clock supplies the time, because the nodes' clocks may differ.
CREATE TABLE nodes (
    instance       TEXT PRIMARY KEY,
    seen_at        BIGINT NOT NULL,
    told           TEXT NOT NULL
);
-- Detects changes of rules without reading their texts.
CREATE INDEX rule_revisions_by_revision ON rule_revisions (revision);
