"""Clients of the HTTP interface over TLS, over a Unix socket, and with keys. Each prints one JSON object.

Usage: operations.py certificate DIR NAME          makes DIR/NAME.crt, and its key DIR/NAME.key
       operations.py https URL CERTIFICATE...      asks for the models, trusting these certificates
       operations.py socket PATH MODEL [KEY]       asks for an answer over a Unix socket
       operations.py key URL KEY                   asks with OpenAI's and Anthropic's packages
       operations.py burst URL MODEL               50 calls at once with OpenAI's package
"""

import concurrent.futures
import datetime
import ipaddress
import json
import os
import socket
import ssl
import sys
import urllib.parse

HI = [{"role": "user", "content": "Say hi."}]


def certificate(folder, name):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(names)
        .issuer_name(names)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for end, mode, text in (("crt", 0o644, made.public_bytes(pem)), ("key", 0o600, secret)):
        # A new file each time, as programs that renew certificates make it.
        path = os.path.join(folder, f"{name}.{end}")
        with open(os.open(path + ".new", os.O_CREAT | os.O_WRONLY, mode), "wb") as file:
            file.write(text)
        os.rename(path + ".new", path)
    return {"serial": str(made.serial_number)}


def _post(stream, path, body, headers):
    """Status and JSON of an HTTP/1.1 exchange on an open stream."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: hearthnet",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    stream.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    answer = b"".join(iter(lambda: stream.recv(65536), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(rest)


def https(url, *trusted):
    at = urllib.parse.urlsplit(url)
    context = ssl.create_default_context()
    # The certificates of the test are their own authorities, which have no such extensions.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    for path in trusted:
        context.load_verify_locations(path)
    plain = socket.create_connection((at.hostname, at.port), timeout=60)
    with context.wrap_socket(plain, server_hostname="localhost") as stream:
        import cryptography.x509

        shown = cryptography.x509.load_der_x509_certificate(stream.getpeercert(True))
        found = {"version": stream.version(), "serial": str(shown.serial_number)}
        # Without a key, the host must be this machine.
        stream.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: stream.recv(65536), b""))
    found["models"] = json.loads(answer.partition(b"\r\n\r\n")[2])["data"]
    return found


def socket_(path, model, key=None):
    headers = [f"Authorization: Bearer {key}"] if key else []
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(60)
        stream.connect(path)
        body = {"model": model, "messages": HI, "max_tokens": 4, "temperature": 0}
        status, answer = _post(stream, "/v1/chat/completions", body, headers)
    return {"status": status, "answer": answer}


def key(url, secret):
    """What a client of each API sees: an answer, or the status and the wait of its refusal."""
    import anthropic
    import openai

    def outcome(ask):
        try:
            return {"text": ask()}
        except (openai.APIStatusError, anthropic.APIStatusError) as refusal:
            headers = refusal.response.headers
            return {
                "status": refusal.status_code,
                "kind": type(refusal).__name__,
                "retry_after": headers.get("retry-after"),
                "message": refusal.message,
            }

    one = openai.OpenAI(base_url=url, api_key=secret, max_retries=0)
    two = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=secret, max_retries=0)
    model = "unknown"

    def chat():
        nonlocal model
        model = one.models.list().data[0].id
        done = one.chat.completions.create(model=model, messages=HI, max_tokens=8)
        return done.choices[0].message.content

    def message():
        return two.messages.create(model=model, messages=HI, max_tokens=8).content[0].text

    return {"openai": outcome(chat), "anthropic": outcome(message)}


def burst(url, model):
    """All calls of a burst are answered, in turn; OpenAI's package does not have to ask again."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)

    def ask(_):
        chat = client.chat.completions.create(
            model=model, messages=HI, max_tokens=2, temperature=0
        )
        return chat.choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(ask, range(50)))
    return {"answers": len(texts), "texts": sorted(set(texts))}


if __name__ == "__main__":
    _, what, *args = sys.argv
    print(json.dumps({"socket": socket_}.get(what, globals().get(what))(*args)))
