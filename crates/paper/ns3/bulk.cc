// One bulk transfer by ns-3's TCP over one link, for step V4 of the validation ladder (docs/papers.md).
//
// usage: bulk RATE DELAY_US MTU BUFFER SECONDS STEP_MS [FRAME...]
//
// RATE is in bit/s, BUFFER the bytes of each socket's buffers. Each FRAME is the number, from 1, of a frame
// of MTU bytes on its way to the receiver that is lost; frames that are sent again count, too. The program
// prints, for each STEP_MS of simulated time, the milliseconds since the start, the bytes that the receiver's
// program has got, and the sender's congestion window in bytes; at the end the frames that were lost.
//
// Build: c++ -O1 bulk.cc -lns3-core -lns3-network -lns3-internet -lns3-point-to-point -lns3-applications \
//            -lns3-traffic-control

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <set>

#include "ns3/applications-module.h"
#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

using namespace ns3;

namespace {

// Loses the frames with the given numbers, of those that are as long as the link allows.
class LoseFullFrames : public ErrorModel {
  public:
    static TypeId GetTypeId() {
        static TypeId type =
            TypeId("quipu::LoseFullFrames").SetParent<ErrorModel>().AddConstructor<LoseFullFrames>();
        return type;
    }

    uint32_t mtu = 1500;
    std::set<uint64_t> numbers;
    uint64_t seen = 0;
    uint64_t lost = 0;

  private:
    bool DoCorrupt(Ptr<Packet> packet) override {
        // PPP has taken its two bytes off, or not yet.
        if (packet->GetSize() < mtu) {
            return false;
        }
        seen += 1;
        bool loses = numbers.count(seen) > 0;
        lost += loses ? 1 : 0;
        return loses;
    }

    void DoReset() override {
        seen = 0;
    }
};

uint32_t g_window = 0;

void WindowChanged(uint32_t, uint32_t now) {
    g_window = now;
}

// The socket exists once the sender has started.
void WatchWindow() {
    Config::ConnectWithoutContext("/NodeList/0/$ns3::TcpL4Protocol/SocketList/0/CongestionWindow",
                                  MakeCallback(&WindowChanged));
}

void Sample(Ptr<PacketSink> sink, Time step) {
    std::cout << Simulator::Now().GetMilliSeconds() << ' ' << sink->GetTotalRx() << ' ' << g_window << '\n';
    Simulator::Schedule(step, &Sample, sink, step);
}

} // namespace

int main(int count, char** arguments) {
    if (count < 7) {
        std::cerr << "usage: bulk RATE DELAY_US MTU BUFFER SECONDS STEP_MS [FRAME...]\n";
        return 2;
    }
    uint64_t values[6];
    for (int at = 0; at < 6; at++) {
        values[at] = std::strtoull(arguments[at + 1], nullptr, 10);
    }
    auto [rate, delay, mtu, buffer, seconds, step] = values;
    Ptr<LoseFullFrames> losses = CreateObject<LoseFullFrames>();
    losses->mtu = mtu;
    for (int at = 7; at < count; at++) {
        losses->numbers.insert(std::strtoull(arguments[at], nullptr, 10));
    }

    // What the simulated hosts of Quipu do, too: CUBIC, SACK, timestamps, an initial window of ten segments.
    Config::SetDefault("ns3::TcpL4Protocol::SocketType", TypeIdValue(TcpCubic::GetTypeId()));
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(mtu - 52));
    Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(10));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(buffer));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(buffer));
    Config::SetDefault("ns3::DropTailQueue<Packet>::MaxSize", StringValue("100000p"));

    NodeContainer nodes(2);
    PointToPointHelper link;
    link.SetDeviceAttribute("DataRate", DataRateValue(DataRate(rate)));
    link.SetDeviceAttribute("Mtu", UintegerValue(mtu));
    link.SetChannelAttribute("Delay", TimeValue(MicroSeconds(delay)));
    NetDeviceContainer devices = link.Install(nodes);
    devices.Get(1)->SetAttribute("ReceiveErrorModel", PointerValue(losses));
    InternetStackHelper stack;
    stack.Install(nodes);
    Ipv4AddressHelper addresses("10.0.0.0", "255.255.255.0");
    Ipv4InterfaceContainer interfaces = addresses.Assign(devices);
    // Nothing but the link and the losses above: no queueing discipline that drops.
    TrafficControlHelper().Uninstall(devices);

    InetSocketAddress at(interfaces.GetAddress(1), 5001);
    ApplicationContainer receivers = PacketSinkHelper("ns3::TcpSocketFactory", at).Install(nodes.Get(1));
    ApplicationContainer senders = BulkSendHelper("ns3::TcpSocketFactory", at).Install(nodes.Get(0));
    receivers.Start(Seconds(0));
    senders.Start(Seconds(0));
    Simulator::Schedule(MicroSeconds(1), &WatchWindow);
    Time every = MilliSeconds(step);
    Simulator::Schedule(every, &Sample, DynamicCast<PacketSink>(receivers.Get(0)), every);
    Simulator::Stop(Seconds(seconds) + MicroSeconds(1));
    Simulator::Run();
    std::cout << "lost " << losses->lost << '\n';
    Simulator::Destroy();
    return 0;
}
