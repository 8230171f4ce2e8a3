// Command generate streams the continuation of a prompt from a Kiln runtime, and prints the text as it comes.
//
//	generate ADDRESS DEPLOYMENT PROMPT
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"

	// Registers the messages that are details of a status.
	_ "google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	runtimev1 "kiln.local/go/kiln/runtime/v1"
)

const maxNewTokens = 32

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: generate ADDRESS DEPLOYMENT PROMPT")
		os.Exit(2)
	}
	// Cancelling the call frees the request's part of the KV cache.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := generate(ctx, os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, describe(err))
		os.Exit(1)
	}
}

// generate prints text as it comes, then why it ended and what it cost.
func generate(ctx context.Context, address, deployment, prompt string) error {
	// The runtime's default is plaintext on loopback; elsewhere, give the channel transport credentials.
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	// Unset options take the deployment's defaults, and unset is not zero: hence pointers.
	temperature, newTokens := float32(0), int32(maxNewTokens)
	stream, err := runtimev1.NewGenerationServiceClient(connection).Generate(ctx, &runtimev1.GenerateRequest{
		DeploymentId: deployment,
		Prompt:       &runtimev1.GenerateRequest_Text{Text: prompt},
		Sampling:     &runtimev1.SamplingParams{Temperature: &temperature},
		Stop:         &runtimev1.StopConditions{MaxNewTokens: &newTokens},
	})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch event := response.Event.(type) {
		case *runtimev1.GenerateResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *runtimev1.GenerateResponse_Finished:
			finished := event.Finished
			fmt.Printf("\n[%s, %d tokens]\n", finished.Reason, finished.Usage.GeneratedTokens)
		}
	}
}

// describe adds the details of a status, which name the reason and the fields at fault.
func describe(err error) string {
	text := err.Error()
	for _, detail := range status.Convert(err).Details() {
		text += fmt.Sprintf("\n  %v", detail)
	}
	return text
}
