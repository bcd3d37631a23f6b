import java.net.InetSocketAddress;
import java.net.StandardSocketOptions;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.Arrays;
import java.util.Random;

/** A server with a selector, and four clients that get back what they send. */
public class Echo {
    static void serve(ServerSocketChannel listener) throws Exception {
        Selector selector = Selector.open();
        listener.configureBlocking(false).register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel fresh = listener.accept();
                    if (fresh == null) continue;
                    fresh.configureBlocking(false);
                    fresh.register(selector, SelectionKey.OP_READ, ByteBuffer.allocate(50000));
                    continue;
                }
                SocketChannel channel = (SocketChannel) key.channel();
                ByteBuffer buffer = (ByteBuffer) key.attachment();
                if (key.isReadable() && channel.read(buffer) < 0) {
                    channel.close();
                    continue;
                }
                buffer.flip();
                channel.write(buffer);
                int more = buffer.hasRemaining() ? SelectionKey.OP_WRITE : 0;
                buffer.compact();
                key.interestOps(more | (buffer.hasRemaining() ? SelectionKey.OP_READ : 0));
            }
            selector.selectedKeys().clear();
        }
    }

    static void ask(InetSocketAddress server, int seed) throws Exception {
        Random random = new Random(seed);
        try (SocketChannel channel = SocketChannel.open(server)) {
            channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
            for (int turn = 0; turn < 600; turn++) {
                byte[] sent = new byte[1 + random.nextInt(turn % 50 == 0 ? 200000 : 300)];
                random.nextBytes(sent);
                Thread sender = new Thread(() -> {
                    try {
                        ByteBuffer all = ByteBuffer.wrap(sent);
                        while (all.hasRemaining()) channel.write(all);
                    } catch (Exception error) {
                        System.out.println(error);
                    }
                });
                if (sent.length > 300) sender.start(); else sender.run();
                ByteBuffer came = ByteBuffer.allocate(sent.length);
                while (came.hasRemaining())
                    if (channel.read(came) < 0) throw new Exception("the stream has ended");
                if (!Arrays.equals(came.array(), sent)) throw new Exception("other octets came");
                sender.join();
            }
        }
    }

    public static void main(String[] words) throws Exception {
        ServerSocketChannel listener = ServerSocketChannel.open().bind(new InetSocketAddress("127.0.0.1", 0));
        Thread server = new Thread(() -> {
            try {
                serve(listener);
            } catch (Exception error) {
                System.out.println(error);
            }
        });
        server.setDaemon(true);
        server.start();
        InetSocketAddress address = (InetSocketAddress) listener.getLocalAddress();
        Thread[] clients = new Thread[4];
        boolean[] good = new boolean[4];
        for (int i = 0; i < clients.length; i++) {
            int seed = i;
            clients[i] = new Thread(() -> {
                try {
                    ask(address, seed);
                    good[seed] = true;
                } catch (Exception error) {
                    System.out.println(error);
                }
            });
            clients[i].start();
        }
        for (Thread client : clients) client.join();
        boolean all = good[0] && good[1] && good[2] && good[3];
        System.out.println(all ? "equal" : "not equal");
        System.exit(all ? 0 : 1);
    }
}
