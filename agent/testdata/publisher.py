"""A publisher of KV events on pyzmq, which is what engines publish with.

It prints the ports of its PUB and ROUTER, and then
obeys lines:

  send N            publish N batches of one stored block each
  lose N            N batches that are for replay only, as if a queue had been full
  forget N          drop the N oldest batches from those that are for replay
  garbage           publish messages that are none
  mute | speak      leave requests for replays unanswered, or answer them again
  flood MB          publish so many megabytes as fast as they go
  stop | start      close the sockets, bind them again at the same ports
  restart           as stop and start, with all sequences anew

Each is answered with "ok SEQ", the sequence of the next batch.
"""

import sys
import time

import msgspec
import zmq

ports = [0, 0]
seq, kept, mute, chain = 0, [], False, 0
pub = router = None


def bind():
    global ctx, pub, router
    ctx = zmq.Context()
    pub, router = ctx.socket(zmq.PUB), ctx.socket(zmq.ROUTER)
    pub.setsockopt(zmq.SNDHWM, 100_000)
    for i, s in enumerate((pub, router)):
        s.setsockopt(zmq.LINGER, 0)
        s.bind("tcp://127.0.0.1:%s" % (ports[i] or "*"))
        ports[i] = int(s.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def batch(pad=0):
    """The next batch: one more block of one chain."""
    global seq, chain
    event = {
        "type": "BlockStored",
        "block_hashes": [1000 + chain],
        "parent_block_hash": 999 + chain if chain else None,
        "token_ids": [chain * 4 + i for i in range(4)],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    if pad:
        event["session_id"] = "x" * pad
    chain += 1
    payload = msgspec.msgpack.encode([time.time(), [event], 0])
    kept.append((seq, payload))
    seq += 1
    return kept[-1]


def send(n, payload):
    pub.send_multipart((b"kv", n.to_bytes(8, "big"), payload))


def replay():
    who, empty, start = router.recv_multipart()
    if mute:
        return
    for n, payload in kept:
        if n >= int.from_bytes(start, "big"):
            router.send_multipart((who, b"", b"kv", n.to_bytes(8, "big"), payload))
    router.send_multipart((who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))


def close():
    pub.close()
    router.close()
    ctx.term()  # when that returns, the ports are free


def obey(command, n):
    global seq, kept, mute, chain
    if command == "send":
        for _ in range(n):
            send(*batch())
    elif command == "lose":
        for _ in range(n):
            batch()
    elif command == "forget":
        del kept[:n]
    elif command == "garbage":
        pub.send(b"kv")
        pub.send_multipart((b"kv", b"123", b"x"))
        kept.append((seq, b"\xc1garbage"))
        send(*kept[-1])
        pub.send_multipart([b"kv"] * 50)
        seq += 1
    elif command == "mute":
        mute = True
    elif command == "speak":
        mute = False
    elif command == "flood":
        for _ in range(n):
            send(*batch(1 << 20))
            del kept[:-10]
    elif command == "stop":
        close()
    elif command == "start":
        bind()
    elif command == "restart":
        close()
        seq, kept, chain = 0, [], 0
        bind()
    else:
        raise ValueError(command)


bind()
print(*ports, flush=True)
poller = zmq.Poller()
poller.register(sys.stdin, zmq.POLLIN)
while True:
    if not router.closed and router not in poller:
        poller.register(router, zmq.POLLIN)
    ready = dict(poller.poll())
    if router in ready:
        replay()
    if sys.stdin.fileno() in ready:
        line = sys.stdin.readline().split()
        if not line:
            break
        if line[0] in ("stop", "restart") and router in poller:
            poller.unregister(router)
        obey(line[0], int(line[1]) if len(line) > 1 else 0)
        print("ok", seq, flush=True)
