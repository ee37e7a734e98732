-- Nodes that rehearse rules ask the others for the traffic that they remember. Both tables are empty but for the seconds in
-- which somebody asks. No value that tells who asks is in them as it is.
CREATE TABLE traffic_asked (
    id             TEXT PRIMARY KEY,
    instance       TEXT NOT NULL,
    asked_at       BIGINT NOT NULL,
    bytes          BIGINT NOT NULL,
    requests       BIGINT NOT NULL,
    wildcards      TEXT NOT NULL
);
CREATE TABLE traffic_told (
    id             TEXT NOT NULL,
    instance       TEXT NOT NULL,
    told_at        BIGINT NOT NULL,
    body           TEXT NOT NULL,
    PRIMARY KEY (id, instance)
);
