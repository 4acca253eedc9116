//! Paths, methods, headers and bodies of requests.

use super::*;

#[test]
fn models_are_listed_and_found() {
    let house = open();
    let list = house.get("/v1/models", "").json();
    assert_eq!(
        (&list["object"], &list["data"][0]["id"]),
        (&json!("list"), &json!("tiny"))
    );
    assert_eq!(house.get("/v1/models/tiny", "").json()["object"], "model");
    let missing = house.get("/v1/models/none", "").error();
    assert_eq!(missing, (404, "model_not_found".into(), "model".into()));
}

#[test]
fn every_refusal_has_its_status_code_and_param() {
    let house = open();
    for (extra, status, code, param) in cases::<(Value, u16, String, String)>(json!([
        [{"model": "none"}, 404, "model_not_found", "model"],
        [{"temperature": 3}, 400, "invalid_value", "temperature"],
        [{"tools": [1]}, 400, "invalid_value", "tools[0]"],
        [{"n": 9}, 400, "invalid_value", "n"],
        // Of a token that this model does not have.
        [{"logit_bias": {"9999999": 1}}, 400, "bad_request", ""],
        [{"top_k": -2}, 400, "invalid_value", "top_k"],
        // Refused by the compiler, for a chat that had its turn.
        [{"json_schema": {"not": {}}}, 400, "unsupported_parameter", "json_schema"],
        [{"structured_outputs": {"regex": "("}}, 400, "invalid_value", "structured_outputs"],
        [{"grammar": "x".repeat(70_000)}, 400, "invalid_value", "grammar"],
    ])) {
        assert_eq!(house.chat(extra).error(), (status, code, param));
    }
    let long = json!({"messages": [{"role": "user", "content": "long ".repeat(300)}]});
    let long = house.chat(long);
    assert_eq!(long.error().1, "context_length_exceeded");
    let said = long.json()["error"]["message"].as_str().unwrap().to_owned();
    // LangChain and LiteLLM look for the first words.
    let begin = "This model's maximum context length is 256 tokens. However, ";
    assert!(said.starts_with(begin), "{said}");
    let not_json = house.raw(&post("/v1/chat/completions", "{", CLOSE));
    assert_eq!(
        not_json.error(),
        (400, "invalid_json".into(), String::new())
    );
    assert_eq!(house.get("/v2", "").error().0, 404);
    let no_text = house.get("/v1/models/%ff", "").error();
    assert_eq!(no_text, (404, "model_not_found".into(), "model".into()));
    assert_eq!(house.get("/v1/chat/completions", "").error().0, 405);
    let typed = |kind: &str| {
        let headers = format!("Content-Length: 0\r\n{kind}");
        house.send("POST /v1/completions", "localhost", &headers)
    };
    let form = typed("Content-Type: application/x-www-form-urlencoded\r\n");
    assert_eq!(form.error().0, 415);
    // Without a type, as some clients of Ollama's send it, it is read as JSON.
    assert_eq!(typed("").error().1, "invalid_json");
}

#[test]
fn a_method_that_a_path_does_not_take_is_refused_and_no_page_is_let_in() {
    let house = open();
    let ask = |method: &str, path: &str, headers: &str| {
        let reply = house.send(&format!("{method} {path}"), "localhost", headers);
        let cors = reply
            .headers
            .keys()
            .find(|name| name.starts_with("access-control"));
        assert_eq!(cors, None, "{method} {path}");
        reply
    };
    // CORS preflight of a page from another origin.
    let preflight = "Origin: https://evil.example\r\nAccess-Control-Request-Method: POST\r\n\
                     Access-Control-Request-Headers: content-type\r\n";
    for (method, path, allow) in [
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET,HEAD"),
        ("POST", "/healthz", "GET,HEAD"),
    ] {
        let reply = ask(method, path, "");
        let refused = (405, "method_not_allowed".into(), String::new());
        assert_eq!(reply.error(), refused, "{method} {path}");
        assert_eq!(reply.headers["allow"], allow);
        if path != "/healthz" {
            let refused = (403, "forbidden_origin".into(), String::new());
            assert_eq!(
                ask(method, path, preflight).error(),
                refused,
                "{method} {path}"
            );
        }
    }
    for path in ["/v1/models", "/healthz", "/metrics"] {
        let reply = ask("HEAD", path, "");
        assert_eq!((reply.status, reply.body.as_str()), (200, ""), "{path}");
    }
    let well = ask("GET", "/healthz", preflight);
    assert_eq!((well.status, well.json()), (200, json!({"status": "ok"})));
}

#[test]
fn additional_slashes_of_a_path_have_no_meaning() {
    let house = open();
    for path in ["/v1/models/", "//v1//models", "/v1/models//?limit=5"] {
        assert_eq!(house.get(path, "").json()["object"], "list", "{path}");
    }
    let reply = house.post("/v1//chat/completions/", &ask(json!({})));
    assert_eq!(reply.status, 200);
    for path in ["/healthz", "/health", "/health/"] {
        assert_eq!(house.get(path, "").json()["status"], "ok", "{path}");
    }
    assert_eq!(house.get("//v2/", "").error().1, "unknown_url");
}

#[test]
fn a_response_has_the_id_of_its_request_or_a_new_one() {
    let house = open();
    let id = |headers: &str| house.get("/v1/none", headers).headers["x-request-id"].clone();
    assert_eq!(id("X-Request-Id: a-1\r\n"), "a-1");
    let (first, second) = (id(""), id(""));
    assert!(first.starts_with("req-") && first != second);
    for unfit in ["a b".to_owned(), "x".repeat(129)] {
        assert!(id(&format!("X-Request-Id: {unfit}\r\n")).starts_with("req-"));
    }
}

#[test]
fn a_stream_tells_its_hosts_in_comments_if_asked() {
    let house = open();
    let body = ask(json!({"stream": true}));
    let reply = house.post_with("/v1/chat/completions", &body, "X-Hearthnet-Trace: 1\r\n");
    let mut traces = reply
        .body
        .lines()
        .filter_map(|line| line.strip_prefix(": hearthnet "));
    let last: Value = serde_json::from_str(traces.next_back().expect("a comment")).unwrap();
    assert_eq!(last["event"], "done");
    assert!(last["data"]["timings"]["tokens_per_second"].is_number());
    assert!(last["data"].get("text").is_none());
    let plain = house.post("/v1/chat/completions", &body);
    assert!(!plain.body.contains(": hearthnet "));
}

#[test]
fn a_body_beyond_the_limit_is_refused_declared_or_not() {
    let house = house_with(settings(1, 1, 1), |http| http.max_body_bytes = 1000);
    let long = json!({"metadata": "x".repeat(2000)});
    assert_eq!(house.chat(long).error().1, "request_too_large");
    let chunk = format!("{:x}\r\n{}\r\n", 600, "x".repeat(600));
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n{chunk}{chunk}0\r\n\r\n"
    );
    assert_eq!(house.raw(&chunked).error().0, 413);
}

#[test]
fn a_compressed_body_is_refused_by_its_coding() {
    let house = open();
    let send = |coding: &str| {
        let coding = format!("Content-Encoding: {coding}\r\n");
        house.post_with("/v1/chat/completions", &ask(json!({})), &coding)
    };
    for coding in ["gzip", "br", "identity, gzip"] {
        let refused = (415, "unsupported_media_type".into(), String::new());
        assert_eq!(send(coding).error(), refused, "{coding}");
    }
    assert_eq!(send("identity").status, 200);
}

/// Reads one response, by its `Content-Length`.
fn one_reply(stream: &mut TcpStream) -> Reply {
    let mut bytes = Vec::new();
    loop {
        let mut more = [0; 4096];
        let count = stream.read(&mut more).unwrap();
        bytes.extend(&more[..count]);
        let text = std::str::from_utf8(&bytes).unwrap();
        assert!(count > 0, "it ended: {text}");
        if let Some((_, body)) = text.split_once("\r\n\r\n") {
            let reply = parse(text);
            if body.len() == reply.headers["content-length"].parse::<usize>().unwrap() {
                return reply;
            }
        }
    }
}

#[test]
fn a_body_that_a_refusal_leaves_unread_spoils_no_later_request_of_its_client() {
    let house = house_with(settings(1, 1, 1), |http| http.max_body_bytes = 5000);
    let json = "Content-Type: application/json\r\n";
    let refusals = [
        ("POST /v1/models", "evil.example", json, 403),
        ("POST /v1/images", "localhost", json, 404),
        ("PUT /v1/completions", "localhost", json, 405),
        ("POST /v1/completions", "localhost", json, 413),
        (
            "POST /v1/completions",
            "localhost",
            "Content-Type: text/plain\r\n",
            415,
        ),
        ("POST /healthz", "localhost", json, 405),
    ];
    for (line, host, kind, status) in refusals {
        for (bytes, goes_on) in [(10_000, true), (200_000, false), (4 << 20, false)] {
            let body = "x".repeat(bytes);
            let mut stream = house.connect();
            let head = format!("{line} HTTP/1.1\r\nHost: {host}\r\n{kind}");
            let request = format!("{head}Content-Length: {bytes}\r\n\r\n{body}");
            // The whole body is sent: a client that reads the response only afterwards still gets
            // it.
            stream.write_all(request.as_bytes()).unwrap();
            let refused = one_reply(&mut stream);
            assert_eq!(refused.status, status, "{line}");
            let closes = refused
                .headers
                .get("connection")
                .is_some_and(|c| c == "close");
            assert_eq!(closes, !goes_on, "{line}, {bytes} bytes");
            if goes_on {
                let next = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
                stream.write_all(next).unwrap();
                assert_eq!(one_reply(&mut stream).status, 200);
            } else {
                assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the end, and no reset");
            }
        }
    }
    // A body held back by `Expect` is not requested.
    let held_back = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\
                     Content-Type: text/plain\r\nExpect: 100-continue\r\n\r\n";
    let refused = house.raw(held_back);
    assert_eq!(
        (refused.status, refused.headers["connection"].as_str()),
        (415, "close")
    );
}

#[test]
fn a_body_that_breaks_off_is_not_said_to_be_too_large() {
    let house = open();
    let broken = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\
                  Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n\
                  no length\r\n";
    assert_eq!(
        house.raw(broken).error(),
        (400, "invalid_json".into(), String::new())
    );
}

#[test]
fn a_request_that_does_not_arrive_ends_with_its_connection() {
    let deadline = Duration::from_millis(50);
    let house = house_with(settings(1, 1, 1), |http| http.client_deadline = deadline);
    let half_a_body = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\
                       Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{";
    assert_eq!(
        house.raw(half_a_body).error(),
        (408, "request_timeout".into(), String::new())
    );
    // An incomplete head gets no response: the connection closes.
    let mut stream = house.connect();
    stream.write_all(b"GET / HTTP/1.1\r\nHo").unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
}
