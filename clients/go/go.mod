module kiln.local/go/example

go 1.19

require (
	google.golang.org/genproto/googleapis/rpc v0.0.0-20231002182017-d307bd883b97
	google.golang.org/grpc v1.60.1
	kiln.local/go v0.0.0
)

// The path that the protos name has no owner: it stands for the stubs that protoc wrote to ./gen.
replace kiln.local/go => ./gen
