module tollgate.dev/client

go 1.23
