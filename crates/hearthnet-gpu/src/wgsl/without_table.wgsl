// Instead of `table.wgsl`, for types without a table.
fn prepare(l: u32, threads: u32) {}
fn decoded(codes: vec4<u32>) -> Quants { return Quants(codes, codes); }
