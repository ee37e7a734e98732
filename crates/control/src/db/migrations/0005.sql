-- Nodes tell now and then what they are at. The database's own clock says when: nodes' clocks may differ.
CREATE TABLE nodes (
    instance       TEXT PRIMARY KEY,
    seen_at        BIGINT NOT NULL,
    told           TEXT NOT NULL
);
-- Whether anything of the rules has changed, without reading their texts.
CREATE INDEX rule_revisions_by_revision ON rule_revisions (revision);
