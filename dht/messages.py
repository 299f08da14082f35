"""The protobuf messages of hivemind's DHT calls with our own fields, and the varint framing around them.

`Look` and the fields from 10 on are ours: a node that does not know them ignores them, and answers as hivemind's do.

Built at import in a pool of their own: generated modules would meet hivemind's and py-libp2p's in the default pool,
where two files must not define the same name. Field numbers are those of hivemind's dht.proto and p2pd.proto,
and of libp2p's kad-dht.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto

# message -> (field, number, type or the name of a message, repeated)
_MESSAGES: dict[str, list[tuple[str, int, Any, bool]]] = {
    "NodeInfo": [("node_id", 1, _Field.TYPE_BYTES, False)],
    "PingRequest": [("peer", 2, "NodeInfo", False)],
    "PingResponse": [("peer", 2, "NodeInfo", False), ("dht_time", 4, _Field.TYPE_DOUBLE, False)],
    "Look": [
        ("salt", 1, _Field.TYPE_BYTES, False),
        ("part", 2, _Field.TYPE_UINT32, False),
        ("parts", 3, _Field.TYPE_UINT32, False),
        ("size", 4, _Field.TYPE_UINT32, False),
        ("whole", 5, _Field.TYPE_BOOL, False),
        ("named", 6, _Field.TYPE_UINT32, False),
        ("within", 7, _Field.TYPE_UINT32, False),
        ("seen", 8, _Field.TYPE_BYTES, False),
        ("below", 9, _Field.TYPE_BOOL, False),
        ("blocks", 10, _Field.TYPE_BYTES, False),
    ],
    "FindRequest": [
        ("keys", 2, _Field.TYPE_BYTES, True),
        ("peer", 3, "NodeInfo", False),
        ("looks", 10, "Look", True),
    ],
    "FindResult": [
        ("type", 1, _Field.TYPE_INT32, False),
        ("value", 2, _Field.TYPE_BYTES, False),
        ("expiration_time", 3, _Field.TYPE_DOUBLE, False),
        ("nearest_node_ids", 4, _Field.TYPE_BYTES, True),
        ("nearest_peer_ids", 5, _Field.TYPE_BYTES, True),
        ("held", 10, _Field.TYPE_UINT32, False),
        ("packed", 11, _Field.TYPE_BYTES, False),
    ],
    "FindResponse": [("results", 2, "FindResult", True), ("peer", 3, "NodeInfo", False)],
    "CallRequest": [
        ("peer", 1, _Field.TYPE_BYTES, False),
        ("proto", 2, _Field.TYPE_STRING, False),
        ("data", 3, _Field.TYPE_BYTES, False),
    ],
    "CallResponse": [("response", 1, _Field.TYPE_BYTES, False), ("error", 2, _Field.TYPE_BYTES, False)],
    "Frame": [
        ("callId", 1, _Field.TYPE_BYTES, False),
        ("callUnary", 3, "CallRequest", False),
        ("unaryResponse", 4, "CallResponse", False),
    ],
    "KadPeer": [("id", 1, _Field.TYPE_BYTES, False), ("addrs", 2, _Field.TYPE_BYTES, True)],
    "KadMessage": [
        ("type", 1, _Field.TYPE_INT32, False),
        ("key", 2, _Field.TYPE_BYTES, False),
        ("closerPeers", 8, "KadPeer", True),
    ],
}
FOUND_DICTIONARY = 2  # FindResult.type
FIND_NODE, PING = 4, 5  # KadMessage.type


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="light.proto", package="light", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if isinstance(kind, str):
                message.field.add(
                    name=field, number=number, label=label, type=_Field.TYPE_MESSAGE, type_name=f".light.{kind}"
                )
            else:
                message.field.add(name=field, number=number, label=label, type=kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"light.{n}")) for n in _MESSAGES}


_classes = _build()
PingRequest, PingResponse = _classes["PingRequest"], _classes["PingResponse"]
NodeInfo, Look = _classes["NodeInfo"], _classes["Look"]
FindRequest, FindResponse, FindResult = _classes["FindRequest"], _classes["FindResponse"], _classes["FindResult"]
CallRequest, Frame = _classes["CallRequest"], _classes["Frame"]
KadMessage, KadPeer = _classes["KadMessage"], _classes["KadPeer"]


def varint(number: int) -> bytes:
    """Return protobuf's form of a length."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
