-- Nothing of it need be kept over a crash, or told to a standby.
ALTER TABLE traffic_asked SET UNLOGGED;
ALTER TABLE traffic_told SET UNLOGGED;
