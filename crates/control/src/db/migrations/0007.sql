-- Nodes that preview rules request traffic samples from other nodes. Both tables are empty except for the seconds of
-- such a request. Values that identify callers are stored only as pseudonyms.
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
