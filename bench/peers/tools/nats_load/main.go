// A load tool in Go for NATS JetStream: `nats-load send|consume URL SUBJECT STREAM BODIES SIZE MESSAGES`.
//
// BODIES is a file of bodies of SIZE bytes, one behind the other. They are sent over and over, and what comes is compared
// with them, in order. Prints one line of JSON: {"messages": N, "seconds": S}.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	pending = 4000
	fetched = 1000
	silence = 10 * time.Second
)

func main() {
	if len(os.Args) != 8 {
		log.Fatal("nats-load send|consume URL SUBJECT STREAM BODIES SIZE MESSAGES")
	}
	url, subject, stream := os.Args[2], os.Args[3], os.Args[4]
	bodies := read(os.Args[5], number(os.Args[6]))
	messages := number(os.Args[7])
	connection := must(nats.Connect(url))
	jetstream := must(connection.JetStream(nats.PublishAsyncMaxPending(pending), nats.MaxWait(time.Minute)))
	var seconds float64
	switch os.Args[1] {
	case "send":
		seconds = send(jetstream, subject, bodies, messages)
	case "consume":
		seconds = consume(jetstream, subject, stream, bodies, messages)
	default:
		log.Fatalf("%s is neither send nor consume", os.Args[1])
	}
	connection.Close()
	fmt.Println(string(must(json.Marshal(map[string]any{"messages": messages, "seconds": seconds}))))
}

// All are acknowledged when it returns.
func send(jetstream nats.JetStreamContext, subject string, bodies [][]byte, messages int) float64 {
	started := time.Now()
	sent := make([]nats.PubAckFuture, messages)
	for at := range sent {
		sent[at] = must(jetstream.PublishAsync(subject, bodies[at%len(bodies)], nats.StallWait(time.Minute)))
	}
	select {
	case <-jetstream.PublishAsyncComplete():
	case <-time.After(time.Minute):
		log.Fatal("messages were not acknowledged in a minute")
	}
	seconds := time.Since(started).Seconds()
	for _, one := range sent {
		select {
		case <-one.Ok():
		case err := <-one.Err():
			log.Fatal(err)
		}
	}
	return seconds
}

// Each is acknowledged, and the broker has nothing left when it returns.
func consume(jetstream nats.JetStreamContext, subject, stream string, bodies [][]byte, messages int) float64 {
	durable := "load"
	puller := must(jetstream.PullSubscribe(subject, durable, nats.BindStream(stream), nats.MaxAckPending(100_000)))
	started := time.Now()
	for came := 0; came < messages; {
		some, err := puller.Fetch(fetched, nats.MaxWait(silence))
		if err != nil {
			log.Fatalf("%d messages came, %d were sent: %v", came, messages, err)
		}
		for _, one := range some {
			if !bytes.Equal(one.Data, bodies[came%len(bodies)]) {
				log.Fatalf("message %d is not what was sent", came)
			}
			if err := one.Ack(); err != nil {
				log.Fatal(err)
			}
			came++
		}
	}
	for {
		told := must(jetstream.ConsumerInfo(stream, durable))
		if told.NumAckPending == 0 && told.NumPending == 0 {
			return time.Since(started).Seconds()
		}
		if time.Since(started) > 10*time.Minute {
			log.Fatalf("the broker keeps %d messages", told.NumAckPending)
		}
	}
}

func read(path string, size int) [][]byte {
	content := must(os.ReadFile(path))
	if size < 1 || len(content) == 0 || len(content)%size != 0 {
		log.Fatalf("%s does not hold bodies of %d bytes", path, size)
	}
	bodies := make([][]byte, len(content)/size)
	for at := range bodies {
		bodies[at] = content[at*size : (at+1)*size]
	}
	return bodies
}

func number(text string) int {
	return must(strconv.Atoi(text))
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
