module tollgate.dev/examples/go

go 1.23

require tollgate.dev/client v0.1.0

replace tollgate.dev/client => ../../clients/go
