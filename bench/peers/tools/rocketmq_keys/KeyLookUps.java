import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Sends messages with a key each, then looks keys up with queryMessage, one at a time.
 *
 * Arguments: name server, topic, messages, bytes of a body, look-ups of each kind. Prints "sent SECONDS", "indexed
 * SECONDS", then a line each of "there" and "missing" with the milliseconds of each look-up.
 */
public class KeyLookUps {
    private static final int BATCH = 256;
    private static final int THREADS = 4;

    private static String keyOf(long number) {
        return String.format("order-%010d", number);
    }

    public static void main(String[] args) throws Exception {
        String names = args[0], topic = args[1];
        long messages = Long.parseLong(args[2]);
        int size = Integer.parseInt(args[3]), count = Integer.parseInt(args[4]);
        long begun = System.nanoTime();
        send(names, topic, messages, size);
        System.out.printf("sent %.3f%n", (System.nanoTime() - begun) / 1e9);

        DefaultMQAdminExt admin = new DefaultMQAdminExt(60_000);
        admin.setNamesrvAddr(names);
        admin.setInstanceName("look-ups");
        admin.start();
        begun = System.nanoTime();
        // The index is made behind the log: wait until it has the last message of each thread.
        for (int thread = 0; thread < THREADS; thread++) {
            long last = messages * (thread + 1) / THREADS - 1;
            while (find(admin, topic, keyOf(last)) == 0) {
                Thread.sleep(100);
            }
        }
        System.out.printf("indexed %.3f%n", (System.nanoTime() - begun) / 1e9);

        Random chance = new Random(1);
        for (int warm = 0; warm < count; warm++) {
            find(admin, topic, keyOf((long) (chance.nextDouble() * messages)));
        }
        StringBuilder there = new StringBuilder("there"), missing = new StringBuilder("missing");
        for (int at = 0; at < count; at++) {
            String key = keyOf((long) (chance.nextDouble() * messages));
            begun = System.nanoTime();
            int found = find(admin, topic, key);
            there.append(String.format(" %.4f", (System.nanoTime() - begun) / 1e6));
            if (found != 1) {
                throw new IllegalStateException(key + " has " + found + " messages");
            }
        }
        for (int at = 0; at < count; at++) {
            begun = System.nanoTime();
            int found = find(admin, topic, "nobody-" + at);
            missing.append(String.format(" %.4f", (System.nanoTime() - begun) / 1e6));
            if (found != 0) {
                throw new IllegalStateException("a key that nobody sent has " + found + " messages");
            }
        }
        System.out.println(there);
        System.out.println(missing);
        System.out.flush();
        System.exit(0);
    }

    private static int find(DefaultMQAdminExt admin, String topic, String key) throws Exception {
        try {
            QueryResult found = admin.queryMessage(topic, key, 100, 0, Long.MAX_VALUE);
            return found.getMessageList().size();
        } catch (MQClientException error) {
            if (error.getResponseCode() == 208 || String.valueOf(error.getErrorMessage()).contains("no message")) {
                return 0;
            }
            throw error;
        }
    }

    private static void send(String names, String topic, long messages, int size) throws Exception {
        CountDownLatch left = new CountDownLatch(THREADS);
        AtomicLong failed = new AtomicLong();
        DefaultMQProducer producer = new DefaultMQProducer("key-look-ups");
        producer.setNamesrvAddr(names);
        producer.setSendMsgTimeout(60_000);
        producer.start();
        for (int thread = 0; thread < THREADS; thread++) {
            long from = messages * thread / THREADS, to = messages * (thread + 1) / THREADS;
            new Thread(() -> {
                try {
                    byte[] body = new byte[size];
                    for (long first = from; first < to; first += BATCH) {
                        List<Message> batch = new ArrayList<>(BATCH);
                        for (long number = first; number < Math.min(first + BATCH, to); number++) {
                            batch.add(new Message(topic, "", keyOf(number), body));
                        }
                        producer.send(batch);
                    }
                } catch (Exception error) {
                    error.printStackTrace();
                    failed.incrementAndGet();
                } finally {
                    left.countDown();
                }
            }).start();
        }
        left.await();
        producer.shutdown();
        if (failed.get() > 0) {
            throw new IllegalStateException("sends have failed");
        }
    }
}
