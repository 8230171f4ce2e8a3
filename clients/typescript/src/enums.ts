/** Names of protobuf enum values as users write them: lower case, without the prefix. */

import type { DescEnum } from "@bufbuild/protobuf";

/** Gives `stop_token` for FINISH_REASON_STOP_TOKEN; the number as text for a value that these messages do not know. */
export function enumName(schema: DescEnum, number: number): string {
  return schema.value[number]?.localName.toLowerCase() ?? String(number);
}

/** Lists the names that `enumNumber` takes, in the order of the enum. */
export function enumNames(schema: DescEnum): string[] {
  return schema.values.filter((value) => value.number !== 0).map((value) => value.localName.toLowerCase());
}

/**
 * Gives the number behind a name; 0, which means the server's default, for undefined.
 *
 * @throws TypeError - No value of the enum has this name.
 */
export function enumNumber(schema: DescEnum, name: string | undefined): number {
  if (name === undefined) {
    return 0;
  }
  const value = schema.values.find(
    (candidate) => candidate.number !== 0 && enumName(schema, candidate.number) === name,
  );
  if (value === undefined) {
    throw new TypeError(`${schema.name}: got ${JSON.stringify(name)}; accepted: ${enumNames(schema).join(", ")}`);
  }
  return value.number;
}
