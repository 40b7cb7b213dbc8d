// What a program of checks in Node needs: where the server is, and one JSON line on stdout for each check.
import process from "node:process";

export const URL = process.env.CHECK_URL;
export const MODEL = process.env.CHECK_MODEL;

export function assert(condition, ...seen) {
  if (!condition) throw new Error("not so: " + seen.map((value) => JSON.stringify(value)).join(" ").slice(0, 800));
}

// The error that a promise is rejected with; not being rejected is a failure.
export async function rejection(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  throw new Error("no error was thrown");
}

// Run checks ({name: [about, function]}) in order, or those named on the command line; exit with 1 when one failed.
export async function run(checks) {
  const wanted = process.argv.slice(2);
  let failed = 0;
  for (const [check, [about, body]] of Object.entries(checks)) {
    if (wanted.length && !wanted.includes(check)) continue;
    const begun = performance.now();
    let status = "pass", detail = "";
    try {
      await body();
    } catch (error) {
      status = "fail";
      detail = `${error.name}: ${error.message}`.slice(0, 500);
      failed++;
      console.error(error);
    }
    const seconds = (performance.now() - begun) / 1000;
    process.stdout.write(JSON.stringify({check, status, detail, about, seconds}) + "\n");
  }
  process.exitCode = failed ? 1 : 0;
}
