// A gubernator node with a fixed list of peers, for `bench cells`: the daemon as its own command starts it, by the same
// environment. Three of them on one machine cannot find each other by gubernator's member list, which names its members by
// the host; its discovery type `none` leaves the list to the program.
package main

import (
	"context"
	"log"
	"os"
	"strings"

	"github.com/gubernator-io/gubernator/v2"
	"github.com/sirupsen/logrus"
)

func main() {
	logger := logrus.New()
	settings, err := gubernator.SetupDaemonConfig(logger, nil)
	if err != nil {
		log.Fatal(err)
	}
	daemon, err := gubernator.SpawnDaemon(context.Background(), settings)
	if err != nil {
		log.Fatal(err)
	}
	var peers []gubernator.PeerInfo
	for _, address := range strings.Split(os.Getenv("BENCH_PEERS"), ",") {
		peers = append(peers, gubernator.PeerInfo{GRPCAddress: address})
	}
	daemon.SetPeers(peers)
	select {}
}
