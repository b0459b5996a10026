// What the page holds: a JSON head, and columns of integers as differences, split into byte planes, deflated, in base64.

async function decodeTimeline(base64) {
  const packed = Uint8Array.from(atob(base64.trim()), (character) => character.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(inflated).arrayBuffer());
  const headBytes = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headBytes)));
  let at = 4 + headBytes;
  const tables = {};
  for (const [table, { rows, columns }] of Object.entries(head.tables)) {
    tables[table] = { length: rows };
    for (const column of columns) {
      tables[table][column] = decodeColumn(bytes, at, rows);
      at += 8 * rows;
    }
  }
  return { ...head, ...tables };
}

function decodeColumn(bytes, at, rows) {
  const column = new Float64Array(rows);
  let value = 0;
  for (let row = 0; row < rows; row++) {
    const byte = (plane) => bytes[at + plane * rows + row];
    const low = (byte(0) | (byte(1) << 8) | (byte(2) << 16) | (byte(3) << 24)) >>> 0;
    const high = byte(4) | (byte(5) << 8) | (byte(6) << 16) | (byte(7) << 24);
    value += low + high * 4294967296;
    column[row] = value;
  }
  return column;
}
