// Serves and fetches by HTTP and by plain TCP: long bodies both ways, in many goroutines.
//
// web serve: prints its ports. web fetch HTTP-PORT TCP-PORT: prints "done".
package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
)

const long = 5<<20 + 12345

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func pattern(seed, length int) []byte {
	octets := make([]byte, length)
	for i := range octets {
		octets[i] = byte((i*7 + seed) >> 3)
	}
	return octets
}

func serve() {
	web, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	go func() {
		for {
			conn, err := plain.Accept()
			check(err)
			// Every message of one MB is sent back.
			go func() {
				defer conn.Close()
				buffer := make([]byte, 1<<20)
				for {
					if _, err := io.ReadFull(conn, buffer); err != nil {
						return
					}
					if _, err := conn.Write(buffer); err != nil {
						return
					}
				}
			}()
		}
	}()
	fmt.Println(web.Addr().(*net.TCPAddr).Port, plain.Addr().(*net.TCPAddr).Port)
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		w.Write(body)
	})
	check(http.Serve(web, nil))
}

func fetch(http_port, tcp_port string) {
	var all sync.WaitGroup
	for number := 0; number < 4; number++ {
		all.Add(2)
		go func(number int) {
			defer all.Done()
			for round := 0; round < 6; round++ {
				body := pattern(number*100+round, long>>(round%3*4))
				answer, err := http.Post("http://127.0.0.1:"+http_port+"/", "a/b", bytes.NewReader(body))
				check(err)
				back, err := io.ReadAll(answer.Body)
				check(err)
				answer.Body.Close()
				if sha256.Sum256(back) != sha256.Sum256(body) {
					check(fmt.Errorf("another body"))
				}
			}
		}(number)
		go func() {
			defer all.Done()
			conn, err := net.Dial("tcp", "127.0.0.1:"+tcp_port)
			check(err)
			defer conn.Close()
			back := make([]byte, 1<<20)
			for round := 0; round < 20; round++ {
				message := pattern(round, 1<<20)
				_, err := conn.Write(message)
				check(err)
				_, err = io.ReadFull(conn, back)
				check(err)
				if !bytes.Equal(message, back) {
					check(fmt.Errorf("another message"))
				}
			}
		}()
	}
	all.Wait()
	fmt.Println("done")
}

func main() {
	if len(os.Args) == 4 {
		fetch(os.Args[2], os.Args[3])
	} else {
		serve()
	}
}
