// Probe is what tests run in a Pod: each command checks or exercises one thing and prints one line.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

const timeout = 3 * time.Second

func main() {
	if len(os.Args) < 2 {
		fail("usage: probe serve PORT TEXT | get URL | dial HOST:PORT | resolve NAME | burn SECONDS | allocate MEBIBYTES")
	}
	arguments := append(os.Args[2:], "", "")
	switch os.Args[1] {
	case "serve":
		serve(arguments[0], arguments[1])
	case "get":
		get(arguments[0])
	case "dial":
		dial(arguments[0])
	case "resolve":
		resolve(arguments[0])
	case "burn":
		burn(number(arguments[0]))
	case "allocate":
		allocate(number(arguments[0]))
	default:
		fail("unknown command " + os.Args[1])
	}
}

// serve answers every request with TEXT until it is asked to end.
func serve(port, text string) {
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, text) })
	go func() { fail(http.ListenAndServe(":"+port, nil).Error()) }()
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM, syscall.SIGINT)
	<-asked
}

// get prints the status and the body, so that an answer by a stranger shows.
func get(url string) {
	client := http.Client{Timeout: timeout}
	response, err := client.Get(url)
	check(err)
	body, err := io.ReadAll(response.Body)
	check(err)
	fmt.Printf("%d %s", response.StatusCode, body)
}

func dial(address string) {
	connection, err := net.DialTimeout("tcp", address, timeout)
	check(err)
	connection.Close()
	fmt.Println("connected")
}

func resolve(name string) {
	started := time.Now()
	addresses, err := net.LookupHost(name)
	if err != nil {
		fmt.Printf("%s after %d ms\n", err, time.Since(started).Milliseconds())
		os.Exit(1)
	}
	fmt.Println(addresses)
}

// burn keeps every thread busy and prints the CPU seconds that it got per second of time.
func burn(seconds int) {
	for range runtime.NumCPU() {
		go func() {
			for {
			}
		}()
	}
	started := time.Now()
	time.Sleep(time.Duration(seconds) * time.Second)
	var used syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	cpu := time.Duration(used.Utime.Nano() + used.Stime.Nano())
	fmt.Printf("%.3f\n", cpu.Seconds()/time.Since(started).Seconds())
}

// allocate touches every page, then says so.
func allocate(mebibytes int) {
	block := make([]byte, mebibytes<<20)
	for i := 0; i < len(block); i += 4096 {
		block[i] = 1
	}
	fmt.Println("allocated", len(block)>>20)
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		fail(err.Error())
	}
}

func fail(text string) {
	fmt.Println(text)
	os.Exit(1)
}
