-- What rules and callers did over time, for the dashboard. One row for each series, step of time and node; rows of
-- ten minutes have no node, because compaction sums over the nodes.
CREATE TABLE history (
    -- The rule (`history_names`), or 0 for all; the caller, or 0 for all.
    rule           BIGINT NOT NULL,
    caller         BIGINT NOT NULL,
    -- Length of the step and its start, in seconds.
    step           BIGINT NOT NULL,
    at             BIGINT NOT NULL,
    node           TEXT NOT NULL,
    allow          BIGINT NOT NULL,
    deny           BIGINT NOT NULL,
    shadow_deny    BIGINT NOT NULL,
    fail_open      BIGINT NOT NULL,
    delayed        BIGINT NOT NULL,
    unmatched      BIGINT NOT NULL,
    p50_us         BIGINT,
    p99_us         BIGINT,
    p999_us        BIGINT,
    PRIMARY KEY (rule, caller, step, at, node)
);
CREATE INDEX history_by_step ON history (step, at);
CREATE INDEX history_by_caller ON history (caller, at) WHERE caller <> 0;

-- Names of the rules and callers above. A caller is shown as the decision log shows it, never by its API key.
CREATE TABLE history_names (
    kind           TEXT NOT NULL,
    id             BIGINT NOT NULL,
    domain         TEXT NOT NULL,
    name           TEXT NOT NULL,
    seen_at        BIGINT NOT NULL,
    PRIMARY KEY (kind, id)
);
