-- Published rule revisions: all are kept, at most one is active.
CREATE TABLE rule_revisions (
    rev                 BIGINT PRIMARY KEY,
    hash                TEXT NOT NULL,
    files               TEXT NOT NULL,
    author              TEXT NOT NULL,
    reason              TEXT NOT NULL,
    created_at          BIGINT NOT NULL,
    status              TEXT NOT NULL,
    base_rev            BIGINT,
    watched             BIGINT NOT NULL,
    active_since        BIGINT,
    approved_by         TEXT,
    rolled_back_because TEXT,
    revision            BIGINT NOT NULL
);
CREATE UNIQUE INDEX rule_revisions_active ON rule_revisions (status) WHERE status = 'active';
