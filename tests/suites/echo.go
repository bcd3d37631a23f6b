// A web server and four clients that get back what they send.
package main

import (
	"bytes"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"os"
)

func ask(url string, seed int64) error {
	random := rand.New(rand.NewSource(seed))
	for turn := 0; turn < 500; turn++ {
		sent := make([]byte, 1+random.Intn(5000))
		random.Read(sent)
		answer, err := http.Post(url, "application/octet-stream", bytes.NewReader(sent))
		if err != nil {
			return err
		}
		came, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil {
			return err
		}
		if !bytes.Equal(came, sent) {
			return fmt.Errorf("other octets came")
		}
	}
	return nil
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	go http.Serve(listener, http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		body, _ := io.ReadAll(request.Body)
		answer.Write(body)
	}))
	results := make(chan error)
	for client := int64(0); client < 4; client++ {
		go func(seed int64) { results <- ask("http://"+listener.Addr().String()+"/", seed) }(client)
	}
	for client := 0; client < 4; client++ {
		if err := <-results; err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	fmt.Println("equal")
}
